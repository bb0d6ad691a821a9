"""The page in the browser: a process of the user who looks, with that user's rights. :doc:`/web` documents it."""
