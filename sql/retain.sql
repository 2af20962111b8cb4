/*
One step of retention: looks at the next @batch rows of @what (messages,
attempts or journal) and removes those that ended longer than @keep ago, dead
letters only longer than @keep_dead; null keeps for ever.

One row: how many were looked at, how many are gone, and whether this pass has
come to the end, as it also has while another dispatcher is at it or the
database is to be spared.
*/
select looked, gone, ended
  from postern.retain(@what, @keep::interval, @keep_dead::interval, @batch)
