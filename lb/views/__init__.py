"""Views: engines, their totals and the lockstep group as people and metrics see them. Pure."""
