"""Looking at numbers: how far two results are apart, and later where values went bad.

Knows no model and changes nothing. Read next: `compare`.
"""
