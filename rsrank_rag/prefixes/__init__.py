"""Documents' keys and values kept between calls."""
