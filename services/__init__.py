"""Who decides and who acts: a room per role, plus the few things that all of them share."""
