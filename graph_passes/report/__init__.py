"""The report: objects, text and an HTML page."""
