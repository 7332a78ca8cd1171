"""What a site puts into its configuration and its queue: settings with their reasons, and batch scripts."""
