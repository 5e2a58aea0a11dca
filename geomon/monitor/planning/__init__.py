"""Planning: at which steps a reading is due, and which of them the budget affords."""
