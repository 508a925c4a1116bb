import com.sun.net.httpserver.HttpServer;
import java.io.InputStream;
import java.net.InetSocketAddress;
import java.net.Socket;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.ByteBuffer;
import java.nio.channels.SelectionKey;
import java.nio.channels.Selector;
import java.nio.channels.ServerSocketChannel;
import java.nio.channels.SocketChannel;
import java.util.Arrays;
import java.util.Random;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Executors;

/** HttpServer with HttpClient, and a selector's echo with blocking sockets: Talk MODE PORT. */
public class Talk {
    public static void main(String[] words) throws Exception {
        int port = Integer.parseInt(words[1]);
        switch (words[0]) {
            case "http-serve" -> httpServe(port);
            case "http-ask" -> httpAsk(port);
            case "nio-serve" -> nioServe(port);
            default -> nioAsk(port);
        }
    }

    static void httpServe(int port) throws Exception {
        HttpServer server = HttpServer.create(new InetSocketAddress("127.0.0.1", port), 64);
        server.createContext("/", exchange -> {
            byte[] body = exchange.getRequestBody().readAllBytes();
            exchange.sendResponseHeaders(200, body.length == 0 ? -1 : body.length);
            exchange.getResponseBody().write(body);
            exchange.close();
        });
        server.setExecutor(Executors.newFixedThreadPool(4));
        server.start();
    }

    static void httpAsk(int port) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        CompletableFuture<?>[] all = new CompletableFuture<?>[40];
        for (int turn = 0; turn < all.length; turn++) {
            byte[] body = new byte[1 + turn * 7919 % 200000];
            new Random(turn).nextBytes(body);
            HttpRequest request =
                HttpRequest.newBuilder(URI.create("http://127.0.0.1:" + port + "/"))
                    .POST(HttpRequest.BodyPublishers.ofByteArray(body)).build();
            all[turn] = client.sendAsync(request, HttpResponse.BodyHandlers.ofByteArray())
                .thenAccept(answer -> {
                    if (!Arrays.equals(answer.body(), body)) {
                        throw new IllegalStateException("another body");
                    }
                });
        }
        CompletableFuture.allOf(all).join();
        System.out.println("all right");
        System.exit(0);
    }

    static void nioServe(int port) throws Exception {
        Selector selector = Selector.open();
        ServerSocketChannel listener = ServerSocketChannel.open();
        listener.bind(new InetSocketAddress("127.0.0.1", port));
        listener.configureBlocking(false);
        listener.register(selector, SelectionKey.OP_ACCEPT);
        while (true) {
            selector.select();
            for (SelectionKey key : selector.selectedKeys()) {
                if (key.isAcceptable()) {
                    SocketChannel peer = listener.accept();
                    peer.configureBlocking(false);
                    peer.register(selector, SelectionKey.OP_READ, ByteBuffer.allocateDirect(65536));
                    continue;
                }
                SocketChannel peer = (SocketChannel) key.channel();
                ByteBuffer bytes = (ByteBuffer) key.attachment();
                boolean ended = key.isReadable() && peer.read(bytes) < 0;
                bytes.flip();
                peer.write(bytes);
                bytes.compact();
                if (ended && bytes.position() == 0) {
                    peer.close();
                    continue;
                }
                int wanted = bytes.hasRemaining() && !ended ? SelectionKey.OP_READ : 0;
                key.interestOps(wanted | (bytes.position() > 0 ? SelectionKey.OP_WRITE : 0));
            }
            selector.selectedKeys().clear();
        }
    }

    static void nioAsk(int port) throws Exception {
        Thread[] threads = new Thread[4];
        boolean[] right = new boolean[threads.length];
        for (int number = 0; number < threads.length; number++) {
            int mine = number;
            threads[number] = new Thread(() -> right[mine] = talk(port, mine));
            threads[number].start();
        }
        for (Thread thread : threads) {
            thread.join();
        }
        for (boolean one : right) {
            if (!one) {
                System.exit(1);
            }
        }
        System.out.println("all right");
    }

    static boolean talk(int port, int seed) {
        byte[] body = new byte[3000000];
        new Random(seed).nextBytes(body);
        try (Socket peer = new Socket("127.0.0.1", port)) {
            Thread sender = new Thread(() -> {
                try {
                    peer.getOutputStream().write(body);
                    peer.shutdownOutput();
                } catch (Exception error) {
                    error.printStackTrace();
                }
            });
            sender.start();
            InputStream in = peer.getInputStream();
            byte[] back = in.readAllBytes();
            sender.join();
            return Arrays.equals(back, body);
        } catch (Exception error) {
            error.printStackTrace();
            return false;
        }
    }
}
