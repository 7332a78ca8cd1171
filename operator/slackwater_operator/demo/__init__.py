"""The demo: the main job on one machine, on real input, watched while it runs and proved at the end."""
