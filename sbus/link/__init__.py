"""Links: what carries messages from one bus to another, and back."""
