"""One module or package per tier. Nothing is imported here: a tier is loaded when it is asked for."""
