"""The page about one or more runs, and the same as pictures for print."""
