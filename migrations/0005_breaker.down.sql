drop table postern.evidence;
drop function postern.open_breaker(text, text, interval), postern.close_breaker(text, text), postern.passes(postern.breaker);
drop table postern.breaker;
drop function postern.cooldown(integer, interval, interval), postern.complete_breaker(), postern.announce_breaker();
