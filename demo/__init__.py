"""The main job: one prompt, eight branches, cascade against what stock users run."""
