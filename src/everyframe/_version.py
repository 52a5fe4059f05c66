"""The version, in a module that everything may import; hatch reads it here."""

__version__ = "0.1.0"
