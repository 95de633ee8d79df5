"""The paper: template, two phases, shift, projection, score, losses. It knows torch and, of ours, errors only."""
