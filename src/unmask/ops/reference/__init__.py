"""Plain-torch definitions of the operations. Import them through `unmask.ops`."""
