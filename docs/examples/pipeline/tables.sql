CREATE TABLE rows USING sbus LOCATION '/var/lib/sbus/journal';

CREATE TABLE recent USING sbus OPTIONS (journal '/var/lib/sbus/journal', pattern 'hosts/*/load', since '-1h');

SELECT key, count(*) AS messages
FROM rows WITH (pattern = 'hosts/a/', since = '2026-05-01 06:03', until = '2026-05-01 06:06')
GROUP BY key
ORDER BY key;

SELECT count(*) AS messages FROM recent;
