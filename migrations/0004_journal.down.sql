drop table postern.journal;
