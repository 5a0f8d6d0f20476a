"""What attack.py does to each part: a function (count, seed) -> Count for each kind."""
