CREATE TEMPORARY VIEW bus USING sbus OPTIONS (journal '/var/lib/sbus/journal');

SELECT substring_index(key, '/', 2) AS prefix, count(*) AS messages, sum(length(payload)) AS bytes
FROM bus
WHERE kind = 'message' AND time >= '2026-05-01 06:00'
GROUP BY prefix
ORDER BY prefix;

CREATE TEMPORARY VIEW loads (time TIMESTAMP, key STRING, payload BINARY)
USING sbus
OPTIONS (journal '/var/lib/sbus/journal', pattern 'hosts/*/load');

SELECT split(key, '/')[1] AS host, max(CAST(decode(payload, 'UTF-8') AS DOUBLE)) AS highest
FROM loads
GROUP BY host
ORDER BY host;
