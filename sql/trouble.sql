/*
What keeps messages from being delivered, or may one day, but for what a
dispatcher that asks knows is not so. Zero rows: nothing.
*/
select t.what, t.error, t.finding, t.mend
  from postern.trouble t
 where t.what <> 'no_dispatcher'
