"""The parts of scripts/leaderboard.py."""
