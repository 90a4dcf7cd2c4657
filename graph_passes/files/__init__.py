"""Models on disk: reading, writing, folders, temporary files, mapped files."""
