drop table postern.journal, postern.dispatcher, postern.breaker;
