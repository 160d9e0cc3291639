"""From the settings to the plan of a run: width, horizon, batch, rates, memory."""
