"""Small programs behind the figures in docs/; each is run with python -m experiments.NAME."""
