/* A client in Node, without a library. Node has no SEQPACKET sockets, so it uses the stream door of the bus:
 *
 *   node client.js sub /run/sbus.stream 'sensors/' [COUNT]    print messages, and exit after COUNT of them
 *   node client.js pub /run/sbus.stream sensors/door open     publish one message
 *   node client.js whoami /run/sbus.stream                    print the prefix of our secret keys
 */
'use strict';

const net = require('net');

/* A connection to the bus. `onPacket(verb, key, payload)` is called for each packet. */
class Bus {
  constructor(address, onPacket) {
    this.onPacket = onPacket;
    this.received = Buffer.alloc(0);
    this.socket = net.connect(address.replace(/^@/, '\0'));
    this.socket.on('data', (data) => this.take(data));
    this.socket.on('error', (error) => fail(`${address}: ${error.message}`));
    this.socket.on('end', () => fail('the bus has closed the connection'));
  }

  /* Send one packet: its length in four bytes, a verb, a key, and (unless it is undefined) a NUL and a payload. */
  send(verb, key, payload) {
    const parts = [Buffer.from(`${verb} ${key}`)];
    if (payload !== undefined) parts.push(Buffer.from([0]), Buffer.from(payload));
    const packet = Buffer.concat(parts);
    const length = Buffer.alloc(4);
    length.writeUInt32LE(packet.length);
    this.socket.write(Buffer.concat([length, packet]));
  }

  /* Cut packets out of what has arrived; the stream can end anywhere in one. */
  take(data) {
    this.received = Buffer.concat([this.received, data]);
    while (this.received.length >= 4) {
      const end = 4 + this.received.readUInt32LE(0);
      if (this.received.length < end) break;
      const packet = this.received.subarray(4, end);
      this.received = this.received.subarray(end);
      const space = packet.indexOf(' ');
      let nul = packet.indexOf(0);
      if (nul < 0) nul = packet.length;
      const key = packet.toString('utf8', space + 1, nul);
      this.onPacket(packet.toString('latin1', 0, space), key, packet.subarray(nul + 1));
    }
  }

  /* Send what waits, then close. */
  close() {
    this.socket.removeAllListeners('end');
    this.socket.end();
  }
}

function fail(why) {
  console.error(why);
  process.exit(1);
}

const WHOAMI = '!/cred/whoami';
const [command, address, key, argument] = process.argv.slice(2);

if (command === 'sub' && key !== undefined) {
  let left = argument === undefined ? Infinity : Number(argument);
  const bus = new Bus(address, (verb, name, payload) => {
    if (verb === 'CMSG' && name === WHOAMI) console.error(`subscribed as ${payload}`);
    if (verb !== 'MSG' || left <= 0) return;
    console.log(`${name}: ${payload}`);
    if (--left === 0) bus.close();
  });
  bus.send('SUB', key);
  bus.send('CMSG', WHOAMI); // the reply shows that everything sent before is in force
} else if (command === 'pub' && argument !== undefined) {
  const bus = new Bus(address, () => {});
  bus.send('MSG', key, argument);
  bus.close();
} else if (command === 'whoami' && address !== undefined) {
  const bus = new Bus(address, (verb, name, payload) => {
    console.log(payload.toString());
    bus.close();
  });
  bus.send('CMSG', WHOAMI);
} else {
  console.error('usage: client.js sub ADDRESS PATTERN [COUNT] | pub ADDRESS KEY PAYLOAD | whoami ADDRESS');
  process.exit(2);
}
