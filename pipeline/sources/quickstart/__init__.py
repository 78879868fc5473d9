"""Built-in corpora that need no download: text and conversations made from the documentation of installed packages."""
