drop table postern.source;
drop function postern.announce_source(), postern.journal_source(), postern.check_source();
