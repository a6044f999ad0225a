"""Images: named sets, own folders and arrays, decoding, streaming, and the views that are made of them."""
