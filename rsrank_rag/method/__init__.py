"""The paper: template, two phases, shift, projection, score. It imports torch and errors only."""
