"""What runs inside a boundary: standard library only, importing nothing else of Fumehood."""
