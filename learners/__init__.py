"""Learning: metrics, schedules, optimizers, train state and train step."""
