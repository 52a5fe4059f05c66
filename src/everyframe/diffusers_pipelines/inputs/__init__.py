"""What a pipeline takes: its signature, its defaults, and a request as the settings of its call."""
