import java.io.DataInputStream;
import java.io.EOFException;
import java.io.IOException;
import java.io.OutputStream;
import java.net.UnixDomainSocketAddress;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.channels.Channels;
import java.nio.channels.SocketChannel;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;

/**
 * A client in Java (16 or later), without a library. Java has no SEQPACKET sockets, so it uses the stream door of the bus:
 *
 * <pre>
 *   java Client.java sub /run/sbus.stream 'sensors/' [COUNT]    print messages, and exit after COUNT of them
 *   java Client.java pub /run/sbus.stream sensors/door open     publish one message
 *   java Client.java whoami /run/sbus.stream                    print the prefix of our secret keys
 * </pre>
 */
public final class Client {
    static final String WHOAMI = "!/cred/whoami";

    /** A packet: a verb, a key, and what follows the NUL behind the key. */
    record Packet(String verb, String key, byte[] payload) {
        static Packet parse(byte[] bytes) {
            int space = 0;
            while (bytes[space] != ' ') space++;
            int nul = space;
            while (nul < bytes.length && bytes[nul] != 0) nul++;
            return new Packet(
                new String(bytes, 0, space, StandardCharsets.US_ASCII),
                new String(bytes, space + 1, nul - space - 1, StandardCharsets.UTF_8),
                Arrays.copyOfRange(bytes, Math.min(nul + 1, bytes.length), bytes.length));
        }
    }

    private final DataInputStream in;
    private final OutputStream out;

    private Client(String address) throws IOException {
        SocketChannel channel = SocketChannel.open(UnixDomainSocketAddress.of(address));
        in = new DataInputStream(Channels.newInputStream(channel));
        out = Channels.newOutputStream(channel);
    }

    /** Send one packet: its length in four bytes, a verb, a key, and (unless it is null) a NUL and a payload. */
    void send(String verb, String key, byte[] payload) throws IOException {
        byte[] head = (verb + ' ' + key).getBytes(StandardCharsets.UTF_8);
        int length = head.length + (payload == null ? 0 : 1 + payload.length);
        ByteBuffer frame = ByteBuffer.allocate(4 + length).order(ByteOrder.LITTLE_ENDIAN).putInt(length).put(head);
        if (payload != null) frame.put((byte) 0).put(payload);
        out.write(frame.array());
        out.flush();
    }

    /** Wait for one packet. */
    Packet receive() throws IOException {
        byte[] packet = new byte[Integer.reverseBytes(in.readInt())];
        in.readFully(packet);
        return Packet.parse(packet);
    }

    /** Ask for our name at the server. The reply also shows that everything sent before is in force. */
    String whoami() throws IOException {
        send("CMSG", WHOAMI, null);
        while (true) {
            Packet packet = receive(); // a program with subscriptions would handle messages here
            if (packet.verb().equals("CMSG") && packet.key().equals(WHOAMI)) {
                return new String(packet.payload(), StandardCharsets.UTF_8);
            }
        }
    }

    public static void main(String[] args) throws IOException {
        String command = args.length >= 2 ? args[0] : "";
        try {
            if (command.equals("sub") && args.length >= 3) {
                Client bus = new Client(args[1]);
                bus.send("SUB", args[2], null);
                System.err.println("subscribed as " + bus.whoami());
                for (long left = args.length > 3 ? Long.parseLong(args[3]) : Long.MAX_VALUE; left > 0; ) {
                    Packet packet = bus.receive();
                    if (!packet.verb().equals("MSG")) continue; // a control message
                    System.out.println(packet.key() + ": " + new String(packet.payload(), StandardCharsets.UTF_8));
                    left--;
                }
            } else if (command.equals("pub") && args.length == 4) {
                new Client(args[1]).send("MSG", args[2], args[3].getBytes(StandardCharsets.UTF_8));
            } else if (command.equals("whoami")) {
                System.out.println(new Client(args[1]).whoami());
            } else {
                System.err.println("usage: Client sub ADDRESS PATTERN [COUNT] | pub ADDRESS KEY PAYLOAD | whoami ADDRESS");
                System.exit(2);
            }
        } catch (EOFException e) {
            System.err.println("the bus has closed the connection");
            System.exit(1);
        }
    }
}
