drop view postern.trouble;
drop function postern.fan_out_missed(bigint, integer), postern.sample_missed(integer);
