"""The bus itself: protocol, registry of subscriptions, credentials, limits, and the service that holds them."""
