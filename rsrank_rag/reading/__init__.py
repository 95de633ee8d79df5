"""What is read of a document: title, sentences, windows."""
