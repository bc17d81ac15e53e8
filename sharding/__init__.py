"""Names, rules and placement: how logical axes become a device mesh."""
