"""The sections of the page: a module each, with a function that returns the data for its template."""
