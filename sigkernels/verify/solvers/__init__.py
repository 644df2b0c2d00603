"""What looks for inputs and multipliers. Nothing found here is believed: the checker beside this package proves it."""
