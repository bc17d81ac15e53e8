"""`tools/migrate_pax`: experiment modules of Pax, rewritten as Paxon's."""
