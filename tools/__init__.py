"""Programs that set up, check and maintain the checkout; they are not part of the library."""
