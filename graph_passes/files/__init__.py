"""Models on disk: reading, writing, folders, files of packed weights, pages of mapped files."""
