import de.bwaldvogel.mongo.MongoServer;
import de.bwaldvogel.mongo.MongoVersion;
import de.bwaldvogel.mongo.backend.memory.MemoryBackend;
import java.util.List;

/** mongo-java-server over its memory; ends with its input. */
class Server {
    /** MongoDB 5.0 with its wire version: the library says 8, which current drivers refuse. */
    static class Version implements MongoVersion {
        public List<Integer> getVersionArray() {
            return List.of(5, 0, 0);
        }

        public int getWireVersion() {
            return 13;
        }
    }

    public static void main(String[] arguments) throws Exception {
        MongoServer server = new MongoServer(new MemoryBackend().version(new Version()));
        server.bind("127.0.0.1", Integer.parseInt(arguments[0]));
        System.out.println("ready");
        while (System.in.read() >= 0) {
        }
        server.shutdownNow();
    }
}
