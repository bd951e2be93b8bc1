"""Images: opened safely, corrupted by rule, drawn for tests."""
