"""GLM-4.5, 4.6 and 4.7, with Air."""
