"""The HTML page about one or more runs, and its figures for print."""
