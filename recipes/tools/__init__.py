"""Programs that the recipes call."""
