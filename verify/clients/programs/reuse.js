// Files opened on the numbers of connections that were closed: reuse.js MODE PORT
const fs = require('fs');
const net = require('net');
const os = require('os');
const path = require('path');

const [mode, port] = process.argv.slice(2);

// Opens files until the numbers just given back are taken, and looks at every byte of each.
function files(tag) {
  const folder = fs.mkdtempSync(path.join(os.tmpdir(), 'reuse-'));
  const opened = [];
  for (let index = 0; index < 6; index++) {
    const words = `${tag} ${index} `.repeat(500);
    const file = path.join(folder, String(index));
    const fd = fs.openSync(file, 'w+');
    if (fs.writeSync(fd, words) !== words.length) throw new Error('a short write');
    opened.push([fd, file, words]);
  }
  for (const [fd, file, words] of opened) {
    const bytes = Buffer.alloc(words.length);
    if (fs.readSync(fd, bytes, 0, bytes.length, 0) !== words.length) throw new Error('a short read');
    if (bytes.toString() !== words) throw new Error('other bytes');
    fs.closeSync(fd);
    if (fs.readFileSync(file, 'utf8') !== words) throw new Error('what was written is lost');
  }
  fs.rmSync(folder, { recursive: true });
}

function serve() {
  net.createServer((socket) => {
    let turns = 0;
    socket.on('data', (bytes) => {
      socket.write(bytes);
      turns += 1;
      if (turns % 20 === 0) socket.end();
    });
    socket.on('close', () => files('server'));
    socket.on('error', () => {});
  }).listen(Number(port), '127.0.0.1');
}

// A connection with enough round trips to be accelerated, then closed by one end or the other.
function ask(left) {
  if (left === 0) {
    console.log('all right');
    return;
  }
  const socket = net.connect(Number(port), '127.0.0.1');
  let turns = 0;
  socket.on('connect', () => socket.write('x'));
  socket.on('data', () => {
    turns += 1;
    if (turns === (left % 2 === 0 ? 15 : 20)) {
      if (left % 2 === 0) socket.destroy();
      return;
    }
    socket.write('x');
  });
  socket.on('end', () => socket.destroy());
  socket.on('close', () => {
    try {
      files('client');
    } catch (error) {
      console.log(`turn ${left}: ${error.message}`);
      process.exit(1);
    }
    ask(left - 1);
  });
}

mode === 'serve' ? serve() : ask(30);
