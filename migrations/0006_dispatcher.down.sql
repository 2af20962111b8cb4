drop table postern.dispatcher;
