"""Images: named data sets, the user's folders and arrays, decoding, streaming, and augmented views."""
