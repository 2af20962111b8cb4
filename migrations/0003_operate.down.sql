drop view postern.message;
