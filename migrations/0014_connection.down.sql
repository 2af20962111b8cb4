drop table postern.connection;
drop function postern.announce_connection(), postern.complete_connection();
